export PATH=$PATH:/tmp/cuo/x/nvidia/cu13/bin
cuobjdump --dump-sass $1 | awk -v k="$2" '/Function/{f=($0~k)} f' | grep -E "^\s+/\*[0-9a-f]{4,5}\*/" | cut -c1-110 > /tmp/m.sass; grep -n "STL\|LDL\|USETMAXREG\|HGMMA\|DEPBAR" /tmp/m.sass | sed 's/ \+/ /g;s/;.*//' | awk '{print $1,$2,$3,$4,$5,$6}' | cut -c1-70
