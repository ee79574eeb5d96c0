"""Where the time of a forward pass goes: every operation by itself, against what the machine can do at best."""

from .bounds import bounds
from .measuring import ceilings_of, profile
from .results import METHOD, Profile, ProfiledOp, Roof
from .trace import trace, write_trace

__all__ = ["METHOD", "Profile", "ProfiledOp", "Roof", "bounds", "ceilings_of", "profile", "trace", "write_trace"]
