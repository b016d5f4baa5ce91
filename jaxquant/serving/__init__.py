"""From trained parameters to served ones: quantized checkpoints, and what a served model keeps."""
