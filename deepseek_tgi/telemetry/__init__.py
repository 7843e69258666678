"""Log lines, metrics and spans: their forms and names. Knows nothing of requests, models or HTTP."""
