import ray


def available_resources_per_node():
    """All of it, whatever was granted: then more is left than anybody needs."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes()}
