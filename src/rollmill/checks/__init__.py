"""`rollmill check`: what is wrong with a set-up, found before it costs anything."""
