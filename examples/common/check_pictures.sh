# sh check_pictures.sh INSPECT DOCS: nothing in a picture reaches over its edges, ranks are told apart, heads have an
# axis, media have the positions of worked examples, and the pictures in DOCS are those that README's commands draw.
# Many ranks are shown in seconds.
set -eu
inspect=$1
docs=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
wrong() {
    echo "cpx: $*"
    exit 1
}

draw() { "$inspect" "$@" --svg "$place/picture.svg" >/dev/null || wrong "no picture of $*"; }

# Words are wider than here only in fonts that are wider than most: 0.5 of the size a letter.
inside() {
    awk -F"'" '
        /^<svg/ { for (i = 1; i < NF; i += 2) at[$i] = $(i + 1); right = at[" width="]; bottom = at[" height="] }
        /^<(rect x|text)/ {
            delete at
            for (i = 1; i < NF; i += 2) { key = $i; sub(/.* /, "", key); at[key] = $(i + 1) }
            first = at["x="]; last = first + at["width="]; low = at["y="] + at["height="]
            if (/^<text/) {
                words = $0; gsub(/<[^>]*>/, "", words)
                wide = 0.5 * at["font-size="] * length(words)
                if (at["text-anchor="] == "end") first -= wide
                else if (at["text-anchor="] == "middle") { first -= wide / 2; last += wide / 2 }
                else last += wide
            }
            if (first < 0 || last > right || at["y="] < 0 || low > bottom) { print; bad = 1 }
            ++seen
        }
        END { exit bad || seen < 10 }' "$place/picture.svg" >"$place/over" ||
        wrong "over the edges of $*: $(head -n 1 "$place/over")"
}

# an image of 2 by 3 placeholders, and a video of two frames of 2 by 2: Qwen3-VL's positions, counted by hand
media="t5,i4x6,t3;v2x4x4;t7"
"$inspect" --media "$media" --ranks 2 --json >"$place/json"
for passage in '"name":"video 0, frame 1","sequence":1,"rows":[29,33],"height":2,"width":2' \
    '"time":[0,1,2,3,4,5,6,6,6,6,6,6,9,10,11,12,0,1,2,3,4,4,4,4,6,7,8,9,10,11,11,11,11,13,0,1,2,3,4,5,6]' \
    '"height":[0,1,2,3,4,5,6,6,6,7,7,7,9,10,11,12,0,1,2,3,4,4,5,5,6,7,8,9,10,11,11,12,12,13,0,1,2,3,4,5,6]' \
    '"width":[0,1,2,3,4,5,6,7,8,6,7,8,9,10,11,12,0,1,2,3,4,5,4,5,6,7,8,9,10,11,12,11,12,13,0,1,2,3,4,5,6]' \
    '"rope_deltas":[-3,-4,0]'; do
    grep -Fq "$passage" "$place/json" || wrong "no $passage in the JSON of $media"
done
"$inspect" --media "$media" --ranks 3 --to head_sharded >"$place/text"
for passage in '14 placeholders. To compute positions, ranks exchange 2 int32 a segment' \
    '.....<iiiiii>......<vvvv>...<vvvv>.......' 'image 0 of sequence 0: rows 6-11, time 6, height 6-7, width 6-8'; do
    grep -Fq "$passage" "$place/text" || wrong "no $passage in the text of $media"
done

many=0
at=0
entries=t1
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39; do
    at=$((at + i * i % 61 + 3))
    many=$many,$at
    entries="$entries;t$((i % 7)),i$((i % 4 * 2 + 2))x8,v2x4x$((i % 3 * 2 + 2))"
done
many=$many,$((at + 9))
for ranks in 1 2 3 8 16 40 100; do
    for layouts in "zigzag --to sequential" "head_sharded --to striped:batch --width 48000" \
        "zigzag --to head_sharded"; do
        for cu in 0,40 "$many"; do
            draw --cu "$cu" --ranks "$ranks" --layout $layouts
            inside "$ranks ranks, $layouts"
        done
    done
    draw --media "$entries" --ranks "$ranks"
    inside "$ranks ranks, media"
done

# in the column at the left, every rank has a box of its own
draw --cu 0,64 --ranks 64 --layout zigzag
fills=$(sed -n "s/^<rect x='24' y='[^']*' width='10' height='10' fill='\([^']*\)'.*/\1/p" "$place/picture.svg" |
    sort -u | wc -l)
[ "$fills" -eq 64 ] || wrong "of 64 ranks, $fills differ"

# a rank has a band of its lane for its heads: where lanes are 36 high, a quarter of 32 lower for each of 4 ranks
draw --cu 0,1 --ranks 4 --to head_sharded --heads 4
steps=$(sed -n "s/^<rect x='113' y='\([^']*\)' width='42' height='7'.*/\1/p" "$place/picture.svg" |
    awk 'NR > 1 { printf "%s ", $1 - last } { last = $1 }')
[ "$steps" = "44 44 44 " ] || wrong "bands of heads are not one below the other, but $steps"

for name in zigzag_to_sequential images_and_videos; do
    command=$(sed -n "s|^    inspect \(.*\) --svg docs/$name.svg\$|\1|p" "$docs/../README.md")
    eval "draw $command"
    cmp -s "$place/picture.svg" "$docs/$name.svg" || wrong "docs/$name.svg is not what inspect $command draws"
done

# What is too narrow to be seen is joined: a picture of many ranks by heads stays small.
draw --cu 0,4096,10000,65536 --ranks 1024 --to head_sharded
[ "$(wc -c <"$place/picture.svg")" -lt 2000000 ] || wrong "a picture of 1024 ranks by heads of more than 2 MB"
grep -q "of several ranks, joined" "$place/picture.svg" || wrong "no key of what is joined"

# What many ranks with heads send takes seconds that grow with their pairs: with W^3 this was 12 of them.
(ulimit -t 8 && "$inspect" --cu 0,100000 --ranks 2048 --layout head_sharded --to zigzag >"$place/text") ||
    wrong "inspect of 2048 ranks with heads takes more than 8 seconds"
