"""Operations of one decoding step, without derivatives: contracts and plain-torch references."""
