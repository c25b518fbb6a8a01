"""What several tests share: graphs and models, ranks that are kept, faked devices, planted errors."""
