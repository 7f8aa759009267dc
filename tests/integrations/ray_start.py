"""Ray, started for a test. Ray gives its processes 30 s to start, which beside other busy processes may not do."""

import ray

TRIES = 3


def start_ray(cpus):
    """A cluster of this process. Tried again where it was too slow."""
    for left in reversed(range(TRIES)):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
