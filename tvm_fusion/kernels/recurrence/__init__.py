"""Recurrences: LSTM, GRU and RNN layers in one direction, as one kernel with a loop over steps."""
