"""`text-generation-launcher`: starts shards and a router, watches them, stops them; restarts nothing, leaves nobody.

Knows command lines, processes and sockets; nothing of gRPC, models or HTTP. Exit codes: 0 stopped by a signal,
1 a child failed, 2 wrong options, 3 unreadable model, 4 unsupported model, 5 memory, disk, port or socket missing,
128 + n stopped at once by a second signal n.
"""
