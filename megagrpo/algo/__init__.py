"""The mathematics: pure functions on tensors. Imports torch only; a reduction over ranks is passed in as a callable."""
