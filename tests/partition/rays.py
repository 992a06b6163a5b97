"""A Ray cluster on this machine, for tests."""

import contextlib


@contextlib.contextmanager
def ray_cluster(head: dict, *nodes: dict):
    """A context with nodes of these resources (`num_cpus`, `num_gpus`); the first node is the head.

    Ray gives a node 30 seconds to start and has no setting for the limit: on a busy machine the start is retried.
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False}))
    try:
        for node in nodes:
            _started(lambda node=node: cluster.add_node(**node))
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _started(start, attempts=3):
    try:
        return start()
    except Exception as error:
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
    return _started(start, attempts - 1)
