"""Health: the states a process goes through and who may move it. Knows nothing of models, gRPC or HTTP."""
