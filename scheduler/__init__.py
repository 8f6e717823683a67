"""Who runs next, and on which session. Pure Python over four small protocols: a device, a tokeniser, a clock, an
output.

Owns the waiting line, the slots, the choice between reuse and eviction, and the step loop. Imports nothing but the
standard library, so that every decision can be tested and simulated without a device.
"""

from scheduler.backend import CHAINED, Answered, Backend, BackendError, Clock, Draws, Output, Pick, Sampled, Text, Verdict, Work
from scheduler.checks import InvariantError
from scheduler.events import Ended, Event, Progress, Routed, SlotStats, Stats, StepDone
from scheduler.job import Job, JobState
from scheduler.loop import Scheduler, Stopping
from scheduler.options import Options
from scheduler.queue import QueueFull

__all__ = [
    "CHAINED",
    "Answered",
    "Backend",
    "BackendError",
    "Clock",
    "Draws",
    "Ended",
    "Event",
    "InvariantError",
    "Job",
    "JobState",
    "Options",
    "Output",
    "Pick",
    "Progress",
    "QueueFull",
    "Routed",
    "Sampled",
    "Scheduler",
    "SlotStats",
    "Stats",
    "StepDone",
    "Stopping",
    "Text",
    "Verdict",
    "Work",
]
