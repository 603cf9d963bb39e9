"""What users call: the native decode, FlashInfer's names, replay, torch.compile, context
parallel."""
