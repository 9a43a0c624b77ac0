# sh check_output.sh FOLDER: the programs in FOLDER fail where their output cannot be written, and say why; what inspect
# writes to a file is there whole or not at all.
bin=$1
golden=../tests/golden
place=$(mktemp -d) || exit 1
trap 'rm -rf "$place"' EXIT
failures=0

# refused REGEX COMMAND...: it must exit with code 1 and say one line on stderr that matches.
refused() {
    regex=$1
    shift
    "$@" 2>"$place/stderr"
    code=$?
    if [ $code -ne 1 ] || [ "$(wc -l <"$place/stderr")" -ne 1 ] || ! grep -Eq "$regex" "$place/stderr"; then
        echo "$*: exit code $code, expected 1 and one line that matches $regex, got" >&2
        cat "$place/stderr" >&2
        failures=$((failures + 1))
    fi
}
# expect WHAT COMMAND...: it must succeed.
expect() {
    what=$1
    shift
    "$@" && return
    echo "expected $what" >&2
    failures=$((failures + 1))
}

moe=data/tiny_qwen3_5_moe
tiny="--model data/tiny_qwen3_5 --reference data/tiny_qwen3_5/reference.safetensors --ranks 1 --linear zigzag"
for command in quickstart new_layout new_operator "inspect --cu 0,8 --ranks 2" "inspect --help" "audit --help" \
    "check_config $moe/config.json $moe/train.json" "check_config $moe/config.json $moe/train.json --json" \
    "names --mesh tp=1 --rank 0 --layers 1" "verify $golden/conv_silu.safetensors" "verify $golden/conv_silu.safetensors --json" "qwen $tiny" "qwen $tiny --json"; do
    program=${command%% *}
    refused "^$program: stdout: cannot be written: No space left" "$bin/"$command <"$0" >/dev/full
    refused "^$program: stdout: closed" "$bin/"$command <"$0" >&-
done

refused "^names: stdin: cannot be read: Is a directory" "$bin/names" --mesh tp=1 --rank 0 --layers 1 </
refused "^names: stdin: cannot be read: Bad file descriptor" "$bin/names" --mesh tp=1 --rank 0 --layers 1 <&-
refused "^decode: .*: log-probabilities: expected those of whole sequences, within 1e-9, got some that differ by" \
    "$bin/decode" --model data/tiny_qwen3_5 --reference $moe/reference.safetensors --ranks 2 >/dev/null

inspect() { "$bin/inspect" --cu 0,8,20 --ranks 2 "$@"; }
whole() { tail -n 1 "$1" | grep -q '</svg>'; }
inspect --svg "$place/new.svg" >/dev/null
expect "a picture" whole "$place/new.svg"
expect "the rights of any new file" [ "$(stat -c %a "$place/new.svg")" = "$(touch "$place/any" && stat -c %a "$place/any")" ]
echo old >"$place/old.svg"
chmod 640 "$place/old.svg"
refused "stdout: cannot be written" inspect --svg "$place/old.svg" >/dev/full
expect "the old file after a run that failed" grep -q '^old$' "$place/old.svg"
refused "stdout: closed" inspect --svg "$place/none.svg" >&-
expect "no file after a run that failed" [ ! -e "$place/none.svg" ]
ln -s old.svg "$place/link.svg"
inspect --svg "$place/link.svg" >/dev/null
expect "a picture where the link leads" whole "$place/old.svg"
expect "the link" [ -L "$place/link.svg" ]
expect "the rights of the old file" [ "$(stat -c %a "$place/old.svg")" = 640 ]
inspect --svg /dev/stdout >"$place/both"
expect "the picture before the text" [ "$(head -c 4 "$place/both")$(grep -c '^rank 1 ' "$place/both")" = "<svg1" ]
expect "a picture through a pipe" [ "$(inspect --svg /dev/fd/3 3>&1 >/dev/null | tail -n 1)" = "</svg>" ]
refused "^inspect: --svg: file: expected a path .*, got \"/dev/full\": No space left" inspect --svg /dev/full
refused '^inspect: --svg: .*, got "a\\x1b\[31m\\xff/b": No such file' inspect --svg "$(printf 'a\033[31m\377/b')"
few_blocks() { (ulimit -f 1 && "$@"); }
refused "^inspect: --svg: .*: File too large" few_blocks inspect --svg "$place/none.svg"
expect "no file of more than is allowed" [ ! -e "$place/none.svg" ]
expect "no file beside these" [ -z "$(find "$place" -name '.cpx*')" ]

# Fewer threads than ranks; sanitizers do not run in so little memory.
if (ulimit -v 400000 && "$bin/inspect" --help >/dev/null 2>&1); then
    (
        ulimit -v 400000
        refused "^verify: threads::run: threads that the system starts .*: expected 256, one a rank, got [0-9]+, then: " \
            "$bin/verify" "$golden/gdr_odd.safetensors" --ranks 256
        [ $failures -eq 0 ]
    ) || failures=$((failures + 1))
fi
[ $failures -eq 0 ]
