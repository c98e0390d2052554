import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

# Other work on the machine must not fail a property: what hypothesis measures by the clock is off.
settings.register_profile("rollmill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollmill")
