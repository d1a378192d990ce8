"""A recovered task as a PEFT adapter on the merged model: `G_t S` is `lora_B @ lora_A`.

What is not a matrix goes by peft's other means. Not all of them go together, so a plan decides first which tensor takes
which way; the tensors follow it. The plan looks at names and shapes only, never at a task's values: adapters of several
tasks can be loaded into one `PeftModel` only if they treat every module alike.
"""

from .export import LoraExport, export_lora

__all__ = ["LoraExport", "export_lora"]
