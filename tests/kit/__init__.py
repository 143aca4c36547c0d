"""What tests of several tiers share: ranks, reference implementation, optimizers, counted memory."""
