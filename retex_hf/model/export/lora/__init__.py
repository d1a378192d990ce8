"""Export of a recovered task as a PEFT adapter on the merged model: `G_t S` is `lora_B @ lora_A`.

Tensors that are not matrices use other mechanisms of peft. Not all of these can be combined, so a plan first decides
how each tensor is stored. The plan depends on names and shapes only, never on a task's values: adapters of several
tasks can be loaded into one `PeftModel` only if they treat every module alike.
"""

from .export import Adapter, LoraExport, export_lora, make_adapter, write_adapter
from .peft_model import to_peft

__all__ = ["Adapter", "LoraExport", "export_lora", "make_adapter", "to_peft", "write_adapter"]
