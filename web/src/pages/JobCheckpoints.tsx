/** The Checkpoints tab of a job: its checkpoints in S3, actions on them, and the command that exports one. */
import { Button } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { useJobAddress } from '../api/addresses'
import { call } from '../api/client'
import { checkpointsQuery, useRole } from '../api/queries'
import type { Checkpoint, CreateCheckpointResponse, TrainingJob } from '../contract'
import { bytes, count, percent } from '../model/format'
import { shellWord } from '../model/outputs'
import { isOver } from '../model/verdict'
import { ActionButton } from '../parts/ActionButton'
import { Ago, Command, Empty, Shown, Status, toneOf } from '../parts/Basics'
import { Card } from '../parts/Card'
import { ConfirmByName } from '../parts/ConfirmByName'
import { CopyId } from '../parts/CopyId'
import { JOB } from '../words/job'
import { CHECKPOINTS_TAB } from '../words/jobTabs'

/** Number of rows that the table has at first, and that each press of the button below it adds. */
const PAGE = 100

export default function CheckpointsTab({ job }: { job: TrainingJob }) {
  const name = useJobAddress(job)
  const query = useQuery(checkpointsQuery(name))
  const trash = useQuery(checkpointsQuery(name, true)).data ?? []
  const { mayRun } = useRole()
  const words = CHECKPOINTS_TAB
  const activity = job.CheckpointActivity
  const next = activity?.NextStep === undefined ? '' : words.next(count(activity.NextStep))
  const policy = words.policy(activity?.Policy ?? words.onStop)
  const canCreate = mayRun && !isOver(job) && job.TrainingJobStatus !== 'Stopping'
  return (
    <div className="stack">
      {canCreate && <Create job={job} checkpoints={query.data ?? []} />}
      <UploadLine job={job} />
      <Shown query={query}>
        {(checkpoints) =>
          checkpoints.length ? (
            <>
              <CheckpointTable job={job} checkpoints={checkpoints} />
              <Export job={name} checkpoints={checkpoints} />
            </>
          ) : (
            <Empty title={words.empty}>{[policy, next, words.memory].filter(Boolean).join(' ')}</Empty>
          )
        }
      </Shown>
      {trash.length > 0 && (
        <>
          <CheckpointTable job={job} checkpoints={trash} label={words.trash} />
          <p className="dim">{words.inTrash(bytes(trash.reduce((sum, each) => sum + each.Bytes, 0)))}</p>
        </>
      )}
    </div>
  )
}

/** Requests a checkpoint, and shows the requested step until the list has the checkpoint. */
function Create({ job, checkpoints }: { job: TrainingJob; checkpoints: readonly Checkpoint[] }) {
  const [requested, setRequested] = useState<CreateCheckpointResponse>()
  const { create, createTitle, requestedStep } = CHECKPOINTS_TAB
  const step = requested?.Step
  const isStored = checkpoints.some((each) => each.Status === 'Complete' && step !== undefined && each.Step >= step)
  return (
    <div className="row">
      <ActionButton
        operation="CreateCheckpoint"
        action={async () => setRequested(await call('CreateCheckpoint', { TrainingJobName: job.RunId }))}
        title={createTitle}
      >
        {create}
      </ActionButton>
      <span className="dim" role="status">
        {step !== undefined && !isStored && requestedStep(count(step))}
      </span>
    </div>
  )
}

/** The checkpoint that is being uploaded, and the progress of the slowest rank. */
function UploadLine({ job }: { job: TrainingJob }) {
  const upload = job.CheckpointActivity?.Upload
  if (upload === undefined) return null
  const share = upload.TotalBytes ? upload.StoredBytes / upload.TotalBytes : 0
  const stored = bytes(upload.SlowestStoredBytes)
  const total = bytes(upload.SlowestTotalBytes)
  const text = CHECKPOINTS_TAB.uploading(count(upload.Step), percent(share), upload.SlowestRank, stored, total)
  return <p title={upload.SlowestObject}>{text}</p>
}

interface TableProps {
  job: TrainingJob
  label?: string
  checkpoints: readonly Checkpoint[]
}

function CheckpointTable({ job, checkpoints, label = JOB.tabs.checkpoints }: TableProps) {
  const { mayRun } = useRole()
  const [limit, setLimit] = useState(PAGE)
  const [deleted, setDeleted] = useState<Checkpoint>()
  const client = useQueryClient()
  const { actions, columns, more } = CHECKPOINTS_TAB
  return (
    <Card isFlush label={label}>
      <div className="scroll">
        <table className="grid stacked">
          <thead>
            <tr>
              <th>{columns.step}</th>
              <th>{columns.status}</th>
              <th>{columns.launch}</th>
              <th className="n">{columns.size}</th>
              <th>{columns.complete}</th>
              <th>{columns.verified}</th>
              <th>{columns.manifest}</th>
              {mayRun && (
                <th>
                  <span className="visually-hidden">{columns.actions}</span>
                </th>
              )}
            </tr>
          </thead>
          <tbody>
            {checkpoints.slice(0, limit).map((each) => (
              <tr key={`${each.Step}-${each.Generation}`}>
                <td data-name={columns.step}>{count(each.Step)}</td>
                <StateCells checkpoint={each} />
                <td className="reason">
                  <CopyId id={each.S3Uri} />
                </td>
                {mayRun && (
                  <td>
                    {each.Status === 'Complete' && (
                      <Actions runId={job.RunId} checkpoint={each} onDelete={() => setDeleted(each)} />
                    )}
                    {each.Status === 'Trashed' && (
                      <ActionButton
                        operation="UndeleteCheckpoint"
                        action={() => call('UndeleteCheckpoint', addressOf(job.RunId, each))}
                        title={actions.undeleteTitle}
                        label={actions.of(actions.undelete, each.Step, each.Generation)}
                      >
                        {actions.undelete}
                      </ActionButton>
                    )}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {checkpoints.length > limit && (
        <Button m="sm" variant="default" size="xs" onClick={() => setLimit(limit + PAGE)}>
          {more(count(Math.min(PAGE, checkpoints.length - limit)), count(checkpoints.length))}
        </Button>
      )}
      {deleted && (
        <ConfirmByName
          name={actions.deleteName(deleted.Step)}
          verb={actions.delete}
          opened
          onClose={() => setDeleted(undefined)}
          onConfirm={async () => {
            await call('DeleteCheckpoint', addressOf(job.RunId, deleted))
            void client.invalidateQueries()
          }}
        >
          {actions.deleteText(job.TrainingJobName, deleted.Generation)}
        </ConfirmByName>
      )}
    </Card>
  )
}

function StateCells({ checkpoint }: { checkpoint: Checkpoint }) {
  const { columns, pinned, until, notVerified } = CHECKPOINTS_TAB
  const verification = checkpoint.Verification ?? 'NotVerified'
  const tone = toneOf(verification === 'Damaged' ? verification : checkpoint.Status)
  return (
    <>
      <td data-name={columns.status}>
        <Status tone={tone} word={checkpoint.Status} />
        {checkpoint.IsPinned && <div className="dim">{pinned}</div>}
        {checkpoint.PurgeTime !== undefined && (
          <div className="dim">
            {until}
            <Ago at={checkpoint.PurgeTime} />
          </div>
        )}
      </td>
      <td data-name={columns.launch}>{checkpoint.Generation}</td>
      <td className="n" data-name={columns.size}>
        {bytes(checkpoint.Bytes)}
      </td>
      <td className="moment" data-name={columns.complete}>
        <Ago at={checkpoint.CompletionTime} />
      </td>
      <td data-name={columns.verified}>
        {verification === 'NotVerified' ? (
          <span className="dim">{notVerified}</span>
        ) : (
          <Status tone={toneOf(verification)} word={verification} />
        )}
        {checkpoint.VerificationTime !== undefined && (
          <>
            {' '}
            <Ago at={checkpoint.VerificationTime} />
          </>
        )}
        {checkpoint.VerificationMessage && <div className="dim">{checkpoint.VerificationMessage}</div>}
      </td>
    </>
  )
}

interface ActionsProps {
  runId: string
  checkpoint: Checkpoint
  onDelete: () => void
}

/** Buttons for a complete checkpoint. A pinned checkpoint cannot be deleted. */
function Actions({ runId, checkpoint, onDelete }: ActionsProps) {
  const words = CHECKPOINTS_TAB.actions
  const address = addressOf(runId, checkpoint)
  const label = (verb: string) => words.of(verb, checkpoint.Step, checkpoint.Generation)
  return (
    <div className="row">
      {checkpoint.Verification !== 'Verifying' && (
        <ActionButton
          operation="VerifyCheckpoint"
          action={() => call('VerifyCheckpoint', address)}
          title={words.verifyTitle}
          label={label(words.verify)}
        >
          {words.verify}
        </ActionButton>
      )}
      {checkpoint.IsPinned ? (
        <ActionButton
          operation="UnpinCheckpoint"
          action={() => call('UnpinCheckpoint', address)}
          label={label(words.unpin)}
        >
          {words.unpin}
        </ActionButton>
      ) : (
        <>
          <ActionButton
            operation="PinCheckpoint"
            action={() => call('PinCheckpoint', address)}
            title={words.pinTitle}
            label={label(words.pin)}
          >
            {words.pin}
          </ActionButton>
          <Button size="xs" color="red" variant="outline" onClick={onDelete} aria-label={label(words.delete)}>
            {words.delete}
          </Button>
        </>
      )}
    </div>
  )
}

/** The command that exports the newest complete checkpoint that no verification found damaged. */
function Export({ job, checkpoints }: { job: string; checkpoints: readonly Checkpoint[] }) {
  const newest = checkpoints.find((each) => each.Status === 'Complete' && each.Verification !== 'Damaged')
  if (newest === undefined) return null
  return (
    <section className="card" aria-label={CHECKPOINTS_TAB.export}>
      <p>{CHECKPOINTS_TAB.exportText}</p>
      <Command text={`everstep checkpoints export ${shellWord(job)} ${newest.Step} --to exported`} />
    </section>
  )
}

const addressOf = (runId: string, { Step, Generation }: Checkpoint) => ({ TrainingJobName: runId, Step, Generation })
