"""Who may open the page: the link, its token, and the cookies."""
