import csv,sys
rows=list(csv.reader(open(sys.argv[1]))); name=sys.argv[2]; step=int(sys.argv[3])
cur=None;h=None;out=[]
for r in rows:
    if r and r[0]=='Kernel Name':
        if cur and name in cur and out: break
        cur=r[1]; continue
    if len(r)>1 and r[1]=='Source': h=r; continue
    if cur and name in cur and h and len(r)==len(h):
        d=dict(zip(h,r)); out.append((int(d['# Samples'] or 0),int(d['Instructions Executed'] or 0),d['Source'].strip()))
import collections
i=0
while i<len(out):
    blk=out[i:i+step]
    ops=collections.Counter(x[2].split()[0] if not x[2].startswith('@') else x[2].split()[1] for x in blk)
    print(i,sum(x[0] for x in blk),'exec',max(x[1] for x in blk),dict(ops.most_common(5)))
    i+=step
