"""A cluster of Ray on this machine, for tests."""

import contextlib


@contextlib.contextmanager
def ray_cluster(head: dict, *nodes: dict):
    """Machines with these resources (`num_cpus`, `num_gpus`), the first of them the head, while the context lasts."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
    for node in nodes:
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()
