"""What routers of experts do besides routing: replay, auxiliary losses, bias."""
