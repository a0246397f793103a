"""What the processes of a run import, so that they are forked from one that has it already."""

import memconsole_torch.engine
import memconsole_torch.techniques.sharding  # noqa: F401
