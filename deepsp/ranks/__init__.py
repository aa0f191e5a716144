"""Process groups: their members, whether these agree, and how bytes travel between them."""

from deepsp.ranks import buffers
from deepsp.ranks.lengths import seq_lens
from deepsp.ranks.transport import Transport

__all__ = ["Transport", "buffers", "seq_lens"]
