"""Operations of numbers of few bits: contracts and plain-torch references."""
