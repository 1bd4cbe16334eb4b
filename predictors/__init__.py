"""Online predictors of output lengths, embedding load and service times, with their uncertainty."""
