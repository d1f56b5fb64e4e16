"""From the actor to the engines: recorded copy lists, transports, digests."""
