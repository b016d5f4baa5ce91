"""Training ops: quantized contractions with their backward passes."""
