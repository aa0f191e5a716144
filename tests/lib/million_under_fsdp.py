"""examples/million.py with FSDP2 on CPUs, where accelerate leaves it out."""

import sys
from pathlib import Path

from trained import under_fsdp

import deepsp.integrations.transformers as integration

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import million

sharded = integration.sequence_parallel
integration.sequence_parallel = lambda trainer: under_fsdp(sharded(trainer))
million.main()
