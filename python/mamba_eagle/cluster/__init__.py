"""Several servers as one: replicas on a Ray cluster."""
