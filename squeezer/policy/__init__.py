"""What the daemon decides: pure state, forecasts and guard. No socket, clock, torch or signal in here."""
