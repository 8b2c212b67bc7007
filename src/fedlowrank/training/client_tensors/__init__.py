"""Tensors with one slice for each client, and the table of rules by which operations apply to each slice.

If a function has two rules, the later one applies.
"""

from .client_tensor import RULES
from .control_flow import CONTROL_FLOW_RULES
from .layer_rules import LAYER_RULES
from .tensor_rules import TENSOR_RULES
from .varying_sizes import VARYING_SIZE_RULES

RULES.update({**LAYER_RULES, **TENSOR_RULES, **CONTROL_FLOW_RULES, **VARYING_SIZE_RULES})
