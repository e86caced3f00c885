"""Preprocessor of mdBook: links that leave docs/ lead to the repository, since the book has no such pages.

mdBook gives the context and the book as a JSON array on standard input, and takes the book from standard output.
"""

import json
import posixpath
import re
import sys

OUTSIDE = re.compile(r"\]\((\.\./[^)\s]+)\)")


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    context, book = json.load(sys.stdin)
    repository = context["config"]["output"]["html"]["git-repository-url"]

    def outside(found):
        return f"]({repository}/blob/main/{posixpath.normpath(posixpath.join('docs', found[1]))})"

    def rewrite(items):
        for item in items:
            if isinstance(item, dict) and "Chapter" in item:
                item["Chapter"]["content"] = OUTSIDE.sub(outside, item["Chapter"]["content"])
                rewrite(item["Chapter"]["sub_items"])

    # The name of the list before mdBook 0.5 was `sections`.
    rewrite(book.get("items") or book["sections"])
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
