# Deals out headers to lines in which each is included by the next one, directly or not.
#
#     grep -r '^#include <cpx/' cpx | awk -v headers="cpx/a.hpp cpx/b.hpp" -f chains.awk
#
# Greedily: the header that includes most begins a line, the largest of those that it includes stands before it.

# Returns a header and all that it includes, between spaces.
function seen_by(header,    list, n, i, all) {
    if (header in known) return known[header]
    all = " " header " "
    n = split(direct[header], list, " ")
    for (i = 1; i <= n; i++) all = with(all, seen_by(list[i]))
    return known[header] = all
}
function with(all, more,    list, n, i) {
    n = split(more, list, " ")
    for (i = 1; i <= n; i++)
        if (!index(all, " " list[i] " ")) all = all list[i] " "
    return all
}
{
    split($0, at, /:#include <|>/)
    direct[at[1]] = direct[at[1]] " " at[2]
}
END {
    n = split(headers, left, " ")
    for (i = 1; i <= n; i++) size[left[i]] = split(seen_by(left[i]), none, " ")
    for (i = 2; i <= n; i++) # the largest first
        for (j = i; j > 1 && size[left[j]] > size[left[j - 1]]; j--) {
            header = left[j]
            left[j] = left[j - 1]
            left[j - 1] = header
        }
    for (i = 1; i <= n; i++) {
        best = 0
        for (c = 1; c <= lines; c++)
            if (index(known[first[c]], " " left[i] " ") && (!best || size[first[c]] < size[first[best]])) best = c
        if (!best) best = ++lines
        first[best] = left[i]
        line[best] = left[i] " " line[best]
    }
    for (c = 1; c <= lines; c++) print line[c]
}
