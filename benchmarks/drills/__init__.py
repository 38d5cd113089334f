"""What can go wrong on the way to a remote tier, done to real servers, and whole fleets of stores on one machine."""
