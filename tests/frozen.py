"""Is imported last by the fork server: forked commands then share all that is loaded.

Otherwise the first garbage collection of each command visits, and so copies, all loaded modules.
"""

import gc

gc.collect()
gc.freeze()
