"""The dry run: follows the placements of tensors through one forward, op by op."""

from deepsp.schedule.flow.alike import compare_inputs
from deepsp.schedule.flow.arguments import call_key
from deepsp.schedule.flow.flow import Findings, Flow, current
from deepsp.schedule.flow.meetings import Meetings
from deepsp.schedule.flow.reshapes import DIVIDED

__all__ = ["DIVIDED", "Findings", "Flow", "Meetings", "call_key", "compare_inputs", "current"]
