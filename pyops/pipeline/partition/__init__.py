"""Which layers go to which stage: costs of layers, exact balance, and planners for stages of
several devices."""
