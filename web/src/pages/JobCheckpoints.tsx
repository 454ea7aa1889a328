/** The Checkpoints tab of a job: its checkpoints in S3, actions on them, and the command that exports one. */
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'

import { useJobAddress } from '../api/addresses'
import { call } from '../api/client'
import { checkpointsQuery, useRole } from '../api/queries'
import type { Checkpoint, CreateCheckpointResponse, TrainingJob } from '../contract'
import { bytes, count, percent } from '../model/format'
import { shellWord } from '../model/outputs'
import { isOver, type Tone } from '../model/standing'
import { ActionButton } from '../parts/ActionButton'
import { Ago, Command, Empty, Shown, Status } from '../parts/Basics'
import { Card } from '../parts/Card'
import { ConfirmButton } from '../parts/ConfirmButton'
import { CopyId } from '../parts/CopyId'
import { Table } from '../parts/Table'
import { JOB } from '../words/job'
import { CHECKPOINTS_TAB } from '../words/jobTabs'

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
      <Shown
        query={query}
        empty={<Empty title={words.empty} text={[policy, next, words.memory].filter(Boolean).join(' ')} />}
      >
        {(checkpoints) => (
          <>
            <CheckpointTable job={job} checkpoints={checkpoints} />
            <Export job={name} checkpoints={checkpoints} />
          </>
        )}
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
  const { columns, more } = CHECKPOINTS_TAB
  return (
    <Card isFlush label={label}>
      <Table
        page={PAGE}
        more={more}
        rows={checkpoints}
        keyOf={(each) => `${each.Step}-${each.Generation}`}
        columns={[
          [columns.step, (each) => count(each.Step)],
          [columns.status, (each) => <State checkpoint={each} />],
          [columns.launch, (each) => each.Generation],
          [columns.size, (each) => bytes(each.Bytes), 'n'],
          [columns.complete, (each) => <Ago at={each.CompletionTime} />, 'moment'],
          [columns.verified, (each) => <Verified checkpoint={each} />],
          [columns.manifest, (each) => <CopyId id={each.S3Uri} />, 'reason'],
          mayRun && [
            columns.actions,
            (each) => <Actions job={job} checkpoint={each} />,
            'unnamed',
            () => ({ 'data-name': undefined }),
          ],
        ]}
      />
    </Card>
  )
}

const TONES: Record<Checkpoint['Status'] | Checkpoint['Verification'], Tone> = {
  Uploading: 'busy',
  Complete: 'good',
  Trashed: 'idle',
  Deleting: 'idle',
  Deleted: 'idle',
  NotVerified: 'idle',
  Verifying: 'busy',
  Waiting: 'warn',
  Intact: 'good',
  Damaged: 'bad',
}

function State({ checkpoint }: { checkpoint: Checkpoint }) {
  const { pinned, until } = CHECKPOINTS_TAB
  const { Status: status, IsPinned, PurgeTime, Verification } = checkpoint
  const tone = TONES[Verification === 'Damaged' ? 'Damaged' : status]
  return (
    <>
      <Status tone={tone} word={status} />
      {IsPinned && <div className="dim">{pinned}</div>}
      {PurgeTime !== undefined && (
        <div className="dim">
          {until}
          <Ago at={PurgeTime} />
        </div>
      )}
    </>
  )
}

function Verified({ checkpoint }: { checkpoint: Checkpoint }) {
  const { Verification: verification, VerificationTime, VerificationMessage } = checkpoint
  return (
    <>
      {verification === 'NotVerified' ? (
        <span className="dim">{CHECKPOINTS_TAB.notVerified}</span>
      ) : (
        <Status tone={TONES[verification]} word={verification} />
      )}
      {VerificationTime !== undefined && ' '}
      {VerificationTime !== undefined && <Ago at={VerificationTime} />}
      {VerificationMessage && <div className="dim">{VerificationMessage}</div>}
    </>
  )
}

/** Buttons for a complete or a trashed checkpoint. A pinned checkpoint cannot be deleted. */
function Actions({ job, checkpoint }: { job: TrainingJob; checkpoint: Checkpoint }) {
  const words = CHECKPOINTS_TAB.actions
  const { Step, Generation, Status: status, IsPinned, Verification } = checkpoint
  const address = { TrainingJobName: job.RunId, Step, Generation }
  const label = (verb: string) => words.of(verb, Step, Generation)
  const button = (operation: CheckpointOperation, verb: string, title?: string) => (
    <ActionButton operation={operation} action={() => call(operation, address)} title={title} label={label(verb)}>
      {verb}
    </ActionButton>
  )
  if (status === 'Trashed') return button('UndeleteCheckpoint', words.undelete, words.undeleteTitle)
  if (status !== 'Complete') return null
  return (
    <div className="row">
      {Verification !== 'Verifying' && button('VerifyCheckpoint', words.verify, words.verifyTitle)}
      {IsPinned ? (
        button('UnpinCheckpoint', words.unpin)
      ) : (
        <>
          {button('PinCheckpoint', words.pin, words.pinTitle)}
          <ConfirmButton
            label={label(words.delete)}
            name={words.deleteName(Step)}
            verb={words.delete}
            onConfirm={() => call('DeleteCheckpoint', address)}
          >
            {words.deleteText(job.TrainingJobName, Generation)}
          </ConfirmButton>
        </>
      )}
    </div>
  )
}
type CheckpointOperation = 'UndeleteCheckpoint' | 'VerifyCheckpoint' | 'UnpinCheckpoint' | 'PinCheckpoint'

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
