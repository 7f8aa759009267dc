"""What the fork server of `forked.py` loads last: no collection in a forked process looks at what was loaded before."""

import gc

gc.collect()
gc.freeze()
