/** Commands that more than one page shows. */
export const FIRST_COMMAND =
  'everstep jobs submit --name gpt --source-dir examples/char_gpt --entry-point train.py --node-count 4'
