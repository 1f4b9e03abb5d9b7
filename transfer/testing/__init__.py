"""What tests of stores, and of code that uses stores, share. Needs pytest; nothing imports it."""
