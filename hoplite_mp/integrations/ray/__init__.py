"""Objects, plans and fault-tolerant collectives inside a Ray cluster. Needs the extra `[ray]`.

    import ray
    import hoplite_mp.integrations.ray as hoplite_ray

    ray.init()
    c = hoplite_ray.init()             # a hoplite_mp node beside each Ray node
    params = c.put(array)              # a ref, for arguments and results of Ray tasks

    @ray.remote
    def norm(params):
        return np.linalg.norm(hoplite_mp.current().get(params))   # no copy

    shared = hoplite_ray.broadcast(ray_ref)             # the value, in the store of every host
    total = hoplite_ray.reduce(ray_refs, "sum", num=5)  # a Ray ref to the sum of the first five
    print(ray.get(total), total.contributors)

The module `collective` has the functions of `ray.util.collective`, implemented with a Group.

Programs on several machines can keep Ray for scheduling, and use this library for transfers that
are slow in Ray.
"""

from hoplite_mp.integrations.ray._driver import init, shutdown
from hoplite_mp.integrations.ray._reducing import Reduction, broadcast, reduce

__all__ = ["Reduction", "broadcast", "init", "reduce", "shutdown"]
