export PATH=$PATH:/tmp/cuo/x/nvidia/cu13/bin
cuobjdump --dump-sass $1 | grep -E "Function|^\s+/\*[0-9a-f]{4,5}\*/" | sed 's#/\*[0-9a-f]*\*/##g' | awk '/HGMMA|DEPBAR|ARRIVE|FMUL|LDSM|SYNCS|BAR|F2F|STSM|BRA|LDS|STL|LDL|FFMA|Function/{print $1=="@P0"||$1~/^@/ ? $1" "$2 : $1, ($0~/gsb0/?"gsb0":"") , ($0~/DEPBAR/?$0:"")}' | uniq -c
