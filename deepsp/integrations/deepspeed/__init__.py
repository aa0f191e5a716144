"""DeepSpeed's attention signature, and the compile pass in its config.

Importing this needs no DeepSpeed.
"""

from deepsp.integrations.deepspeed.attention import DistributedAttention
from deepsp.integrations.deepspeed.config import sequence_group

__all__ = ["DistributedAttention", "sequence_group"]
