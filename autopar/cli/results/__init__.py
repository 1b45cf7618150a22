"""What commands print beside their options, and what they write with it."""
