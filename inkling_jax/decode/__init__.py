"""How tokens come out: prefill, then rounds of draft, verify, accept and stop in one loop on the device."""
