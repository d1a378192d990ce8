"""Export of a recovered task as a PEFT adapter on the merged model: `G_t S` is `lora_B @ lora_A`.

Tensors that are not matrices use other mechanisms of peft. Not all of these can be combined, so a plan first decides
how each tensor is stored. The plan depends on names and shapes only, never on a task's values: adapters of several
tasks can be loaded into one `PeftModel` only if they treat every module alike.
"""

from .export import LoraExport, export_lora

__all__ = ["LoraExport", "export_lora"]
