ncu --clock-control none --section SpeedOfLight --section SourceCounters --section WarpStateStats --section Occupancy --kernel-name regex:"delta_rule_(main|prep)" --launch-count 2 -f -o /tmp/r1 ./dev prof > /dev/null 2>&1
ncu --clock-control none --section SpeedOfLight --section SourceCounters --section WarpStateStats --section Occupancy --kernel-name regex:"delta_rule_state" --launch-count 1 -f -o /tmp/r2 ./dev prof2 > /dev/null 2>&1
for r in r1 r2; do ncu --import /tmp/$r.ncu-rep --page details > $OUT/$r.txt 2>&1; ncu --import /tmp/$r.ncu-rep --page source --csv > $OUT/$r.csv 2>&1; done
ls -la $OUT
