"""What is sent and when: prompts of a file, arrival schedules."""

from servetune.traffic.arrivals import offsets
from servetune.traffic.prompts import Prompt, read_prompts, warm_up_prompts

__all__ = ["Prompt", "offsets", "read_prompts", "warm_up_prompts"]
