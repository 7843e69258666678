"""Health: the states a process goes through, who may move it, and the faces that tell. Knows nothing of models."""
