// Writes the Parquet files of this directory with DuckDB (npm: @duckdb/node-api), so that another writer than the library
// under test has made them: node make_parquet.mjs
import { DuckDBInstance } from '@duckdb/node-api';
const c = await (await DuckDBInstance.create(':memory:')).connect();
// Lists of structs; a column that must not be read; rows that are bad: content null, no turn, no list.
await c.run(`copy (select * from (values
 (1, [{'role':'user','content':'Hi é 漢'},{'role':'assistant','content':'Hello'}], [0.5::float,1.5::float], null::varchar),
 (2, [{'role':'human','content':''},{'role':'gpt','content':'<|end|>'},{'role':'user','content':'u'},{'role':'assistant','content':'a'}], null, 'x'),
 (3, [{'role':'user','content':null},{'role':'assistant','content':'no'}], null, 'x'),
 (4, [], null, null),
 (5, null, null, null)) t(id,messages,embedding,input)) to 'messages.parquet' (format parquet, compression zstd)`);
// Columns that hold the JSON text of messages, and one of plain text that looks like it.
await c.run(`copy (select * from (values
 ('[{"role":"user","content":"q1"}]','[{"role":"assistant","content":"good"}]','[{"role":"assistant","content":"bad"}]'),
 ('plain [not json','yes','no'))t(prompt,chosen,rejected)) to 'pairs.parquet' (format parquet, compression snappy)`);
await c.run(`copy (select * from (values ('p','c',true),('p2','c2',false)) t(prompt,completion,label)) to 'labels.parquet' (format parquet)`);
await c.run(`copy (select * from (values ('p','c',0.75::float),('p2','c2',0.25::float)) t(prompt,completion,reward)) to 'rewards.parquet' (format parquet, compression gzip)`);
